"""``"when": "auto"``: measure native and encoded messages, and decide whether encoding pays.

traffic_profile  messages of the first steps, from which trials are planned
trials           native and encoded messages, to be timed
timing           timing of trials to a verdict, within ``memory_limits``
verdicts         the verdict of each dimension, and for which steps it holds
recheck          comparison of native and encoded steps of the run after a close trial
remembered       verdicts of earlier runs on the same machines, and their files
measured         tables of ``hybridcomp measure`` in place of long trials
"""
