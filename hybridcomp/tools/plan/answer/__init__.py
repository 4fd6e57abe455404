"""Print, draw and write the planner's answer, try its plans, and check finished runs.

report   the ranked table, and the reasons why the first plan beats the second
picture  speed against bits, memory, and the timeline of the best plan
files    plan.json and the engine's configuration; ``start_command``: what starts the plan
trial    --try: the best plans for some steps each, on the machines
check    --check: a finished run against its prediction
command  the command line
"""
