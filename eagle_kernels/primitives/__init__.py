"""L1, what two or more families of ops share: device functions, with the checks and arguments that belong to them."""
