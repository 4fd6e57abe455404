"""What backs a claim: measurements against peers, and the chapters of docs/results."""
