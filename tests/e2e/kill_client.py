"""A client that is there to be killed: opens a session with LoRAs, starts one job, and waits.

Arguments: address, LoRAs split by commas, the job's GenerateParams in proto JSON (or "-" for no job).
"""

import sys

import conftest
from google.protobuf import json_format
from latentd.v1 import denoise_pb2


class Remote(conftest.Daemon):
    def __init__(self, address):  # no process of its own
        self.channel = conftest.grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        self.denoise = conftest.denoise_pb2_grpc.DenoiseServiceStub(self.channel)


address, loras, params = sys.argv[1:4]
if params.startswith("@"):
    params = open(params[1:]).read()
session = Remote(address).session(lora=loras.split(","))
if params != "-":
    session.send(request_id="j", denoise=denoise_pb2.SessionRequest.Denoise(
        job_id="j", params=json_format.Parse(params, denoise_pb2.GenerateParams())))
print("open", flush=True)
for _ in session.call:
    pass
