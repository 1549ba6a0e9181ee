"""Second pass: hypotheses weighed anew once their stream has ended."""
