"""The tests. A package, so that ranks import a test module under the name that pytest gave it."""
