"""Load tests without locust: plans, schedules, workloads, histograms, SLOs, reports, search and comparison.

The users and shapes that send the requests are in `deploy/locust/`; nothing here imports locust or gevent.
"""
