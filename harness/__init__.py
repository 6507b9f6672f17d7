"""The command line: replay captured verify steps, compare, show, and report."""
