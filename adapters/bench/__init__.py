"""Measurements: each module has one function that measures and returns a plain, JSON-ready result.

`steps` the engine alone over a scripted executor; `throughput` and `latency` a real model, also against transformers;
`callers` the kinds of caller against each other. The command line only parses options and prints.
"""
