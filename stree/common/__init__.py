"""Errors, files, threads and device memory: shared by all folders."""
