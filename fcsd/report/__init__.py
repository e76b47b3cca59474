"""Write what people read: tables, figures, the report of a run.

Not covered: uploading; that is `fcsd.report.publish.push`.
"""
