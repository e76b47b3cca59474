"""What people read: tables, figures, the report of a run, the model card.

Not covered: uploading; pages that show single answers side by side.
"""
