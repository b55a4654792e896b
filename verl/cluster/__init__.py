"""Placement: which role runs where, and how calls and data reach it."""
