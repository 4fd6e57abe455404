"""``"when": "auto"``: what links give is measured, and a verdict says whether encoding pays.

observed  the messages of a run that are waited for before a trial can be made of them
trials    native and encoded messages, timed beside each other
room      how much memory they may take
judging   timing them to a verdict
verdicts  what they say, by dimension, and how long it holds
recheck   steps of the run itself, natively and encoded in turns, where a trial was close
"""
