"""Real time: the processes of a cluster on one machine, and what they say to each other.

    launcher ── starts and restarts ──┬─ store_process   one per node, owns the host pool (L2)
                                      ├─ engine_process  one per node, computes
                                      ├─ controller_process  one, drives the pure ControlPlane
                                      └─ gateway         one, HTTP

A process finds the others through the cluster's run directory (``places``) and proves with the
cluster secret that it belongs to it (``kv/channel.py``).
"""
