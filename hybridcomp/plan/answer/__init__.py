"""What a person gets out of the planner: table, reasons, pictures, files, trials and checks.

report   the ranked table, and why the first plan beats the second
picture  speed against bits, memory, and the timeline of the best plan
files    plan.json, the engine's configuration and the launcher's command
trial    --try: the best plans for some steps each, on the machines
check    --check: a finished run against its prediction
command  the command line
"""
