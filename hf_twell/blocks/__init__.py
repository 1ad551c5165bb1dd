"""The block that `sparsify` puts into a model: which modules it is made of, and which way each call goes."""
