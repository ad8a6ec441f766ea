"""REST: the gateway's HTTP listener.

``routes`` has every route as data, ``handlers`` what they do, ``serving`` how a
request is read, let in and answered, ``openapi`` the document of it all.
"""
