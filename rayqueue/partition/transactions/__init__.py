"""Transactions in a partition: what is open, what was aborted, and what counts once its transaction is committed.

``commands`` are the entries of the log, ``open`` the machine's part, and its text
the theory; ``runs`` is the index by which readers pass over what is not committed.
"""
