"""Recorded agent traffic: importers, one format a file, all to one ``Workload``; then prompts."""
