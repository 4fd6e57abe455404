"""``"when": "auto"``: measure native and encoded messages, and decide whether encoding pays.

observed  messages that a run sends in its first steps, from which trials are planned
trials    native and encoded messages, to be timed
room      memory that trials may take
timing    timing of trials to a verdict
verdicts  the verdict of each dimension, and for which steps it holds
recheck   comparison of native and encoded steps of the run, where a trial was close
remembered  what earlier runs found on the same machines, and their files
"""
