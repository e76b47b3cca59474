"""Write output for people: tables, figures, the report of a run.

Not covered: uploading; that is `fcsd.report.publish.push`.
"""
