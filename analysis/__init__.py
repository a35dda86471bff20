"""Run folders in, numbers and figures out. Light: only the modules that draw load matplotlib."""
