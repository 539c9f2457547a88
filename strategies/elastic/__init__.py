"""Local steps of workers that go on without a lost worker: worker 0 averages the weights of the present members."""
