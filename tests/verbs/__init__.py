"""The fabric over a real RDMA device: two daemons in a guest whose kernel has soft-RoCE, which this machine's need not have.

../guests boots it, inside.py is what runs in it, verbs_test.py says what must come of it.
"""
