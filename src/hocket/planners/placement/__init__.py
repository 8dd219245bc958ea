"""Planners that decide on which device each op runs.

One algorithm per file or package: baselines, list scheduling (m-ETF, m-SCT), m-TOPO, ParDNN, local
search, exact search and repairs for devices with too little memory. `registry.py` lists them by
name.
"""
