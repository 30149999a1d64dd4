"""Suites that are run by hand, as modules: `README.md` lists them."""
