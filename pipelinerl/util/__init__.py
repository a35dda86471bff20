"""Shared by all packages: strict models, tables in files, running means."""
