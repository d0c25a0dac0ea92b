"""Ask an endpoint for the target's replies, once each, within a budget; or be such an endpoint.

In: Prompts, sampling, an endpoint. Out: Responses and journals that survive a kill.
Pure: outcomes, faults, budget, limiter, jobs, rows, prices. Edges: journal, client, run, progress,
server.
"""
