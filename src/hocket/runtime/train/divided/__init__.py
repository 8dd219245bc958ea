"""A config (data x tensor x pipeline) that carries a person's own module, one process per rank.

Each kind of parallelism is one part of its own. Data parallelism is a strategy around any other one
(``replicas``, ``sharded``), a pipeline cuts the recorded step (``stages``, ``staged``), and tensor
parallelism changes the model's layers before anything is recorded (``tensor``). All ranks run the
same script on the same batches and take their rows.
"""
