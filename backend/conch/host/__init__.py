"""Inside Triton's stub: tensors to requests, detokeniser, responder, metrics, engine client; supervisor."""
