"""The rollouts of one run, however many: an index in memory, filters, search, samples and what each token is taught."""
