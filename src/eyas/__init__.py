"""eyas: from prompts to an EAGLE-3 drafter, with every token, dollar and byte accounted for."""
