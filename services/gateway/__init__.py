"""HTTP gateway: FastAPI, one process.

app          the wired application          middleware   layers that a request passes before the routes
routes       one module for each resource   admission    checks of a new job
events       streams of a job's events      openai       chats with a job's policy
"""
