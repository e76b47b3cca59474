"""What people read: tables, figures, the report of a run, the model card.

Not covered: uploading; that is `fcsd.publish.push`.
"""
