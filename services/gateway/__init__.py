"""The HTTP gateway: FastAPI, one process.

app          the application, wired         middleware   what a request passes first
routes       one module for each kind       admission    checks of a new job
events       streams of a job's events      openai       chats with a job's policy
"""
