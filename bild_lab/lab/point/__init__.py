"""This folder leads from a configuration to objects that decode, and from a prompt to text.

All of it can change a number.
"""
