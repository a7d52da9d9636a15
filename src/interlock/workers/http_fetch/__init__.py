"""`http_fetch`: requests the URL of a task and returns the server's response.

operator     the operator, and the thread that sends its requests
config       the job's config
template     request bodies filled from the payload
fetching     one attempt: waits for a permit, sends the request, retries when the server names a time
politeness   concurrency limit and delay per host
reporting    the response as a task's result
"""
