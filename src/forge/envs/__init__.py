"""Episodes: programs that talk to the policy over any number of turns, use tools and assign rewards."""
