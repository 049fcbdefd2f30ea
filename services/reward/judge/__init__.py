"""Judges: language models behind endpoints of the operator's, which score responses.

template  the request's text        answer    the score in what the model says
endpoint  one server's client       cache     answers by their requests
judge     one judge of a job        endpoints all servers that jobs may use
"""
