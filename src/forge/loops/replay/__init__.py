"""Replay of a run's steps and groups from what the run recorded.

recorded.py      what a run's folder holds, and which steps can be replayed from which checkpoint
steps.py         trains steps again and compares them with their records
groups.py        samples a group again and compares it token by token
bisecting.py     finds the first step that cannot be reproduced
comparing.py     the differences, in the order of their causes
session.py       what the steps of one session have in common
"""
