"""Every JSON body on the wire, for the server and the client SDK.

Names are a contract. Requests of users reject unknown fields, so that a typo is an error and not a silent default.
Requests of workers ignore them, so that workers and dispatchers of adjacent versions are compatible.
"""
