"""Google's gRPC client for Python against a gateway, with stubs that Google's protoc generated from proto/.

Usage: CONSTRUCT_GATEWAY_URL=http://… CONSTRUCT_KEY=… check.py. The key must belong to an owner or an admin
and have the scope `admin`. The created tasks are deleted; their agent stays. Started by the test
`clients_in_other_languages_work`; `./dev clients` runs it.
"""

import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
# The messages of reflection, which are the same in both of its versions.
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from grpc_tools import protoc

# Longer than any answer takes.
TIMEOUT = 20


def check(holds, what):
    if not holds:
        raise SystemExit(f"wrong: {what}")


def done(what):
    global last
    last = what
    print(f"ok: grpcio {grpc.__version__}: {what}", flush=True)


def unexpected(kind, error, trace):
    """Reports an unexpected failure of a call, and where it happened, in one line."""
    sys.__excepthook__(kind, error, trace)
    message = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else f"{kind.__name__}: {error}"
    print(f"wrong: what comes after '{last}': {message}", file=sys.stderr)


last = "the beginning"
sys.excepthook = unexpected


def refused(code, what, call):
    """The error of a call that must be refused this way."""
    try:
        answer = call()
    except grpc.RpcError as error:
        check(error.code() == code, f"{what}: {error.code()} instead of {code}: {error.details()}")
        return error
    raise SystemExit(f"wrong: {what}: answered instead of {code}: {answer}")


def environment(name):
    value = os.environ.get(name)
    if not value:
        raise SystemExit(f"{name} has to be set")
    return value


def generated():
    """The modules that protoc generates from the contract."""
    root = Path(__file__).resolve().parents[2] / "proto"
    found = [*(root / "construct/v1").glob("*.proto"), *(root / "google/api").glob("*.proto")]
    files = sorted(str(file.relative_to(root)) for file in found)
    check(files, f"there is no contract in {root}")
    out = tempfile.TemporaryDirectory()
    own = Path(protoc.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{root}", f"-I{own}", f"--python_out={out.name}", f"--grpc_python_out={out.name}", *files]
    check(protoc.main(arguments) == 0, "protoc does not take the contract")
    sys.path.insert(0, out.name)
    return out, files


url, key = urlsplit(environment("CONSTRUCT_GATEWAY_URL")), environment("CONSTRUCT_KEY")
# Kept until the end, when it is deleted.
folder, files = generated()
from construct.v1 import agent_pb2, agent_pb2_grpc, common_pb2, event_pb2, event_pb2_grpc, model_pb2, model_pb2_grpc
from construct.v1 import model_provider_pb2, model_provider_pb2_grpc, organization_pb2, organization_pb2_grpc
from construct.v1 import task_pb2, task_pb2_grpc

done(f"protoc makes stubs of {len(files)} files")


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the credentials to each call."""

    def __init__(self, bearer):
        self.bearer = bearer

    def call(self, go_on, details, request):
        metadata = [*(details.metadata or []), ("authorization", f"Bearer {self.bearer}")]
        return go_on(details._replace(metadata=metadata), request)

    intercept_unary_unary = call
    intercept_unary_stream = call


def open_channel(**options):
    if url.scheme == "https":
        return grpc.secure_channel(url.netloc, grpc.ssl_channel_credentials(), **options)
    return grpc.insecure_channel(url.netloc, **options)


def with_key(channel, bearer=key):
    return grpc.intercept_channel(channel, Bearer(bearer))


# The settings of a client that wants to detect a dead connection soon.
keepalive = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
plain = open_channel(options=keepalive)
try:
    grpc.channel_ready_future(plain).result(timeout=TIMEOUT)
except grpc.FutureTimeoutError:
    raise SystemExit(f"no gateway answers at {url.geturl()}") from None
channel = with_key(plain)
agents, tasks = agent_pb2_grpc.AgentServiceStub(channel), task_pb2_grpc.TaskServiceStub(channel)
models, events = model_pb2_grpc.ModelServiceStub(channel), event_pb2_grpc.EventServiceStub(channel)
providers = model_provider_pb2_grpc.ModelProviderServiceStub(channel)

who = organization_pb2_grpc.OrganizationServiceStub(channel).WhoAmI(organization_pb2.WhoAmIRequest(), timeout=TIMEOUT)
check(who.organization_id and who.api_key_id, f"who am I: {who}")
done("a call with a key")

for wrong, what in ((f"{key}x", "a wrong key"), ("ct_", "half a key")):
    stub = organization_pb2_grpc.OrganizationServiceStub(with_key(plain, wrong))
    refused(grpc.StatusCode.UNAUTHENTICATED, what, lambda: stub.WhoAmI(organization_pb2.WhoAmIRequest(), timeout=TIMEOUT))
stub = event_pb2_grpc.EventServiceStub(with_key(plain, f"{key}x"))
refused(grpc.StatusCode.UNAUTHENTICATED, "a stream with a wrong key", lambda: next(stub.Subscribe(event_pb2.SubscribeRequest(), timeout=TIMEOUT)))
done("a wrong key is UNAUTHENTICATED")

name = f"grpcio-{uuid.uuid4().hex[:12]}"
spec = model_provider_pb2.ModelProviderSpec(name=name, type=model_provider_pb2.MODEL_PROVIDER_TYPE_SCRIPTED)
providers.CreateModelProvider(model_provider_pb2.CreateModelProviderRequest(spec=spec), timeout=TIMEOUT)
models.CreateModel(model_pb2.CreateModelRequest(spec=model_pb2.ModelSpec(name=name, provider=name)), timeout=TIMEOUT)
words = "You keep the ledger — 😀. " * 200
spec = agent_pb2.AgentSpec(name=name, model=name, instructions=words)
agent = agents.CreateAgent(agent_pb2.CreateAgentRequest(spec=spec), timeout=TIMEOUT)
check(agent.metadata.id.startswith("agent_") and agent.spec.instructions == words, f"the agent that is made: {agent}")
check(agents.GetAgent(agent_pb2.GetAgentRequest(agent=name), timeout=TIMEOUT) == agent, "the agent is another one when it is asked for")
request = task_pb2.CreateTaskRequest(spec=task_pb2.TaskSpec(agent=name, title="The books of May"), idempotency_key=name)
task = tasks.CreateTask(request, timeout=TIMEOUT)
check(tasks.CreateTask(request, timeout=TIMEOUT).metadata.id == task.metadata.id, "a task is created twice for one idempotency key")
tasks.CreateTask(task_pb2.CreateTaskRequest(spec=request.spec), timeout=TIMEOUT)
page, seen = common_pb2.PageRequest(page_size=1), []
while True:
    found = tasks.ListTasks(task_pb2.ListTasksRequest(page=page, filter=task_pb2.ListTasksRequest.Filter(agent=name)), timeout=TIMEOUT)
    seen += [found.metadata.id for found in found.tasks]
    page.page_token = found.page.next_page_token
    if not page.page_token:
        break
check(len(seen) == 2 and task.metadata.id in seen, f"the tasks, page by page: {seen}")
done("create, get and list")

bad = agent_pb2.CreateAgentRequest(spec=agent_pb2.AgentSpec(name="Not a name", model=name, max_turns=5000))
error = refused(grpc.StatusCode.INVALID_ARGUMENT, "an agent that cannot be", lambda: agents.CreateAgent(bad, timeout=TIMEOUT))
status, violations = rpc_status.from_call(error), error_details_pb2.BadRequest()
check(status is not None and status.code == 3 and status.message, f"the error has no google.rpc.Status: {error}")
check(any(detail.Unpack(violations) for detail in status.details), f"no google.rpc.BadRequest among {status.details}")
fields = {violation.field: violation.description for violation in violations.field_violations}
check({"spec.name", "spec.max_turns"} <= fields.keys() and all(fields.values()), f"the fields that are wrong: {fields}")
missing = task_pb2.GetTaskRequest(task=f"task_{uuid.uuid4()}")
refused(grpc.StatusCode.NOT_FOUND, "a task that is not there", lambda: tasks.GetTask(missing, timeout=TIMEOUT))
done("errors have google.rpc details")


def follow(stub, rename, what):
    """A subscription that replays earlier events and continues with new ones."""
    request = event_pb2.SubscribeRequest(task=task.metadata.id, cursor="0", types=["task.*"])
    stream = stub.Subscribe(request, timeout=TIMEOUT)
    first = next(stream)
    check(first.type == "task.created" and first.task.spec.agent == name, f"{what}: the first event: {first}")
    rename(task_pb2.UpdateTaskRequest(task=task.metadata.id, title=what), timeout=TIMEOUT)
    for event in stream:
        if event.type == "task.updated" and event.task.spec.title == what:
            break
    else:
        raise SystemExit(f"wrong: {what}: the stream ends before the event")
    stream.cancel()
    # Exactly the following events, for a client that returns.
    again = stub.Subscribe(event_pb2.SubscribeRequest(task=task.metadata.id, cursor=first.cursor, types=["task.*"]), timeout=TIMEOUT)
    check(next(again).sequence > first.sequence, f"{what}: the first event is repeated")
    again.cancel()


follow(events, tasks.UpdateTask, "a subscription")
done("Subscribe replays, goes on live, and is resumed by its cursor")

began = time.monotonic()
quiet = events.Subscribe(event_pb2.SubscribeRequest(task=task.metadata.id), timeout=1)
refused(grpc.StatusCode.DEADLINE_EXCEEDED, "a subscription with a deadline", lambda: list(quiet))
check(0.8 < time.monotonic() - began < 10, f"the deadline of a second came after {time.monotonic() - began:.1f} s")
done("a deadline ends a subscription with DEADLINE_EXCEEDED")

packed = with_key(open_channel(options=keepalive, compression=grpc.Compression.Gzip))
stub = agent_pb2_grpc.AgentServiceStub(packed)
answer = stub.GetAgent(agent_pb2.GetAgentRequest(agent=name), timeout=TIMEOUT)
check(answer.spec == agent.spec, f"an answer that is compressed: {answer}")
longer = words * 2
changed = stub.UpdateAgent(agent_pb2.UpdateAgentRequest(agent=name, instructions=longer), timeout=TIMEOUT)
check(changed.spec.instructions == longer, "a request that is compressed")
follow(event_pb2_grpc.EventServiceStub(packed), task_pb2_grpc.TaskServiceStub(packed).UpdateTask, "a compressed subscription")
refused(grpc.StatusCode.INVALID_ARGUMENT, "a compressed request that is wrong", lambda: stub.CreateAgent(bad, timeout=TIMEOUT))
packed_health = health_pb2_grpc.HealthStub(packed).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
check(packed_health.status == health_pb2.HealthCheckResponse.SERVING, f"health, compressed: {packed_health}")
done("a channel with gzip, Subscribe and health included")

health = health_pb2_grpc.HealthStub(plain)
for service in ("", "construct.v1.TaskService"):
    status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT).status
    check(status == health_pb2.HealthCheckResponse.SERVING, f"health of '{service}': {status}")
watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
check(next(watch).status == health_pb2.HealthCheckResponse.SERVING, "health as it is watched")
watch.cancel()
refused(grpc.StatusCode.NOT_FOUND, "health of what is not there", lambda: health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=TIMEOUT))
done("health")

reflect = plain.stream_stream(
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
    response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
)
asked = [
    reflection_pb2.ServerReflectionRequest(list_services=""),
    reflection_pb2.ServerReflectionRequest(file_containing_symbol="construct.v1.TaskService"),
]
listed, shown = reflect(iter(asked), timeout=TIMEOUT)
names = {service.name for service in listed.list_services_response.service}
check({"construct.v1.TaskService", "construct.v1.EventService", "grpc.health.v1.Health"} <= names, f"the services by reflection: {names}")
known = descriptor_pb2.FileDescriptorProto.FromString(shown.file_descriptor_response.file_descriptor_proto[0])
ours = descriptor_pb2.FileDescriptorProto()
task_pb2.DESCRIPTOR.CopyToProto(ours)
# Reflection shows the contract without its own options.
for method in ours.service[0].method:
    for field in [field for field, _ in method.options.ListFields() if field.is_extension]:
        method.options.ClearExtension(field)
    method.options.DiscardUnknownFields()
check(list(known.service) == list(ours.service), "reflection shows another TaskService than proto/ has")
check([it.name for it in known.message_type] == [it.name for it in ours.message_type], "reflection shows other messages than proto/ has")
# The client of the package, which uses the previous version.
database = ProtoReflectionDescriptorDatabase(plain)
check(set(database.get_services()) == names, f"the services by reflection before version 1: {database.get_services()}")
found = descriptor_pb2.ServiceDescriptorProto()
descriptor_pool.DescriptorPool(database).FindServiceByName("construct.v1.TaskService").CopyToProto(found)
check(found == ours.service[0], "reflection before version 1 shows another TaskService than proto/ has")
done("reflection, in both of its versions")

for found in seen:
    tasks.DeleteTask(task_pb2.DeleteTaskRequest(task=found), timeout=TIMEOUT)
print("grpcio works")
