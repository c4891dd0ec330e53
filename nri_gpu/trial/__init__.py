"""`helm test`: a pod that asks for a GPU as users' pods do, and what became of it."""
