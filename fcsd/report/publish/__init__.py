"""The model card, the publish folder and its upload to the Hub.

Not covered: the report of a run (`fcsd.report`).
"""
