"""`http_fetch`: asks the URL of a task and returns what the server answers.

operator     the operator, and the thread that it asks in
config       what the job's config says
template     bodies made of the payload
fetching     one attempt: waits its turn, asks, asks again where the server says when
politeness   how many ask one host at once, and how soon after each other
reporting    the reply as a task's result
"""
