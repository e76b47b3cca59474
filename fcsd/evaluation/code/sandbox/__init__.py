"""The sandbox that runs generated programs: `server.py` is run as `python -I`, never
imported into the main process; `job.py` has its examiner and program.

Four kinds of process, each with less to lose than the previous:

    scorer      the caller (`fcsd.evaluation.code.scorer`); may hold a model and a GPU
    supervisor  `python -I server.py`, fresh and with an empty environment; waits, and cleans up if the
                scorer dies
    server      first process of its own namespaces; makes a folder and starts two processes for each job,
                and ends all three after it; opens nothing that a job leaves
    examiner    runs the tests of one job; the expected outputs are here, and only here
    program     runs the generated code of one job, and answers the examiner's calls in plain values

Success is decided by the examiner, in whose memory no generated code ever runs. The
program is started before the job is read, so neither tests nor expected outputs are
anywhere in its memory, stack frames or files, and there is no token whose possession
means success. An object that claims to be equal to everything does not cross: values
are rebuilt from JSON as plain Python values. See `layers.py` for the kernel's
restrictions, and `cell.py` for the resources of a job.

Not covered: bugs of the kernel; probing whether a path exists (stat is allowed);
reading the Python installation and /usr; timing of other processes; a program that
recognises the visible tests of its prompt and answers only those; programs that need to
start processes, open sockets, or take functions as arguments from a test.
"""
