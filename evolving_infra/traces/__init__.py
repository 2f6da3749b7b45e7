"""Recorded agent traffic: importers, one format a file, all to one ``Workload``; scaling and prompts."""
