// Buf's clients for Node against a gateway: the Connect protocol, gRPC-Web and gRPC. Nothing is
// generated: the services come from reflection, and are read as descriptors.
//
// Usage: CONSTRUCT_GATEWAY_URL=http://… CONSTRUCT_KEY=… node check.mjs, beside `node_modules` with
// the packages of package.json. The key must belong to an owner or an admin and have the scope
// `admin`. The created tasks are deleted; their agent stays. Started by the test
// `clients_in_other_languages_work`; `./dev clients` runs it.

import { randomUUID } from "node:crypto";
import { subscribe } from "node:diagnostics_channel";

import { create, createFileRegistry, equals, fromBinary, toBinary } from "@bufbuild/protobuf";
import {
  FieldDescriptorProto_Label,
  FieldDescriptorProto_Type,
  FileDescriptorProtoSchema,
  FileDescriptorSetSchema,
} from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import {
  compressionGzip,
  createConnectTransport,
  createGrpcTransport,
  createGrpcWebTransport,
} from "@connectrpc/connect-node";

// Milliseconds; longer than any answer takes.
const TIMEOUT = 20_000;

function wrong(what) {
  console.error(`wrong: ${what}`);
  process.exit(1);
}

function check(holds, what) {
  if (!holds) wrong(what);
}

function done(what) {
  console.log(`ok: connect-node: ${what}`);
}

function environment(name) {
  return process.env[name] || wrong(`${name} has to be set`);
}

// The error of a call that must be refused this way.
async function refused(code, what, call) {
  let answer;
  try {
    answer = await call();
  } catch (error) {
    const found = ConnectError.from(error);
    check(found.code === code, `${what}: ${found} instead of ${Code[code]}`);
    return found;
  }
  return wrong(`${what}: answered instead of ${Code[code]}: ${answer}`);
}

for (const kind of ["uncaughtException", "unhandledRejection"]) process.on(kind, (error) => wrong(error?.stack ?? error));
const baseUrl = environment("CONSTRUCT_GATEWAY_URL");
const key = environment("CONSTRUCT_KEY");

// The last exchange on the wire. The HTTP method is known for HTTP/1.1 only: transports choose it
// behind the interface they show.
const seen = { verb: "", encoding: "" };
subscribe("http.client.request.start", ({ request }) => (seen.verb = request.method));

// Adds the credentials to each call.
function bearer(key) {
  return (next) => async (request) => {
    request.header.set("authorization", `Bearer ${key}`);
    const response = await next(request);
    seen.encoding = response.header.get("content-encoding") ?? response.header.get("grpc-encoding") ?? "";
    return response;
  };
}

// A message of a contract that is too small to be requested: its fields are [name, number, type,
// type's name].
function message(name, ...fields) {
  const field = ([name, number, type, typeName, label = FieldDescriptorProto_Label.OPTIONAL]) => ({
    name,
    number,
    type,
    typeName,
    label,
  });
  return { name, field: fields.map(field) };
}

const { STRING, BYTES, MESSAGE } = FieldDescriptorProto_Type;
const { REPEATED } = FieldDescriptorProto_Label;
const reflection = {
  name: "grpc/reflection/v1/reflection.proto",
  package: "grpc.reflection.v1",
  syntax: "proto3",
  messageType: [
    message(
      "ServerReflectionRequest",
      ["file_by_filename", 3, STRING],
      ["file_containing_symbol", 4, STRING],
      ["list_services", 7, STRING],
    ),
    message("ServiceResponse", ["name", 1, STRING]),
    message("ListServiceResponse", ["service", 1, MESSAGE, ".grpc.reflection.v1.ServiceResponse", REPEATED]),
    message("FileDescriptorResponse", ["file_descriptor_proto", 1, BYTES, undefined, REPEATED]),
    message("ErrorResponse", ["error_message", 2, STRING]),
    message(
      "ServerReflectionResponse",
      ["file_descriptor_response", 4, MESSAGE, ".grpc.reflection.v1.FileDescriptorResponse"],
      ["list_services_response", 6, MESSAGE, ".grpc.reflection.v1.ListServiceResponse"],
      ["error_response", 7, MESSAGE, ".grpc.reflection.v1.ErrorResponse"],
    ),
  ],
  service: [
    {
      name: "ServerReflection",
      method: [
        {
          name: "ServerReflectionInfo",
          inputType: ".grpc.reflection.v1.ServerReflectionRequest",
          outputType: ".grpc.reflection.v1.ServerReflectionResponse",
          clientStreaming: true,
          serverStreaming: true,
        },
      ],
    },
  ],
};
for (const kind of reflection.messageType.filter((kind) => kind.name.startsWith("ServerReflectionRe"))) {
  kind.oneofDecl = [{ name: "message" }];
  for (const field of kind.field) field.oneofIndex = 0;
}
const details = {
  name: "google/rpc/error_details.proto",
  package: "google.rpc",
  syntax: "proto3",
  messageType: [
    {
      ...message("BadRequest", ["field_violations", 1, MESSAGE, ".google.rpc.BadRequest.FieldViolation", REPEATED]),
      nestedType: [message("FieldViolation", ["field", 1, STRING], ["description", 2, STRING])],
    },
  ],
};
function registry(files) {
  return createFileRegistry(create(FileDescriptorSetSchema, { file: files }));
}
const small = registry([reflection, details].map((file) => create(FileDescriptorProtoSchema, file)));
const BadRequest = small.getMessage("google.rpc.BadRequest");

// The gateway's contract: every file that its services need, imported ones first.
async function reflected() {
  const transport = createGrpcTransport({ baseUrl });
  const client = createClient(small.getService("grpc.reflection.v1.ServerReflection"), transport);
  const ask = async (request) => {
    async function* requests() {
      yield { message: request };
    }
    for await (const { message } of client.serverReflectionInfo(requests(), { timeoutMs: TIMEOUT })) {
      check(message.case !== "errorResponse", `reflection of ${request.value}: ${message.value?.errorMessage}`);
      return message.value;
    }
    return wrong(`reflection of ${request.value} is not answered`);
  };
  const names = (await ask({ case: "listServices", value: "" })).service.map((service) => service.name);
  const files = new Map();
  const add = async (request) => {
    for (const bytes of (await ask(request)).fileDescriptorProto) {
      const file = fromBinary(FileDescriptorProtoSchema, bytes);
      for (const name of file.dependency) {
        if (!files.has(name)) await add({ case: "fileByFilename", value: name });
      }
      files.set(file.name, file);
    }
  };
  for (const name of names.filter((name) => name.startsWith("construct.v1."))) {
    await add({ case: "fileContainingSymbol", value: name });
  }
  return { names, registry: registry([...files.values()]) };
}

const contract = await reflected().catch((error) => wrong(`reflection over gRPC: ${error}`));
check(contract.names.includes("construct.v1.EventService"), `services: ${contract.names}`);
done(`reflection over gRPC describes ${contract.names.length} services`);

const service = (name) => contract.registry.getService(`construct.v1.${name}`) ?? wrong(`there is no ${name}`);
const services = {
  agents: service("AgentService"),
  events: service("EventService"),
  models: service("ModelService"),
  organizations: service("OrganizationService"),
  providers: service("ModelProviderService"),
  tasks: service("TaskService"),
};
function clients(transport) {
  return Object.fromEntries(Object.entries(services).map(([name, service]) => [name, createClient(service, transport)]));
}

const SCRIPTED = contract.registry.getEnum("construct.v1.ModelProviderType").value;
const type = Object.values(SCRIPTED).find((value) => value.name === "MODEL_PROVIDER_TYPE_SCRIPTED").number;
const name = `connect-${randomUUID().slice(0, 13)}`;
const instructions = "You keep the ledger — 😀. ".repeat(200);
const gzip = { acceptCompression: [compressionGzip], sendCompression: compressionGzip, compressMinBytes: 0 };
const none = { acceptCompression: [] };

// The checks of every protocol, whatever its transport.
async function works(what, make, options, { packs }) {
  const transport = make({ baseUrl, interceptors: [bearer(key)], ...options });
  const { agents, events, organizations, tasks } = clients(transport);
  const patience = { timeoutMs: TIMEOUT };

  const agent = await agents.getAgent({ agent: name }, patience);
  check(agent.spec.instructions === instructions, `${what}: the agent: ${agent.spec.instructions.slice(0, 99)}`);
  if (options.useHttpGet) check(seen.verb === "GET", `${what}: what only reads is asked for with ${seen.verb}`);
  // With GET the client doesn't announce that it accepts compressed answers, but its requests may
  // be compressed.
  const encoding = packs && !options.useHttpGet ? "gzip" : "";
  check(seen.encoding === encoding, `${what}: the answer's encoding is '${seen.encoding}'`);
  const task = await tasks.createTask({ spec: { agent: name, title: what } }, patience);
  if (options.useHttpGet) check(seen.verb === "POST", `${what}: a task is made with ${seen.verb}`);
  const again = await tasks.getTask({ task: task.metadata.id }, patience);
  check(again.spec.title === what && again.metadata.revision === task.metadata.revision, `${what}: the task: ${again.spec.title}`);
  const found = await tasks.listTasks({ page: { pageSize: 100 }, filter: { agent: name } }, patience);
  check(found.tasks.some((found) => found.metadata.id === task.metadata.id), `${what}: the task is not in the list`);

  const spec = { name: "Not a name", model: name, maxTurns: 5000 };
  const error = await refused(Code.InvalidArgument, `${what}: an agent that cannot be`, () => agents.createAgent({ spec }, patience));
  const [bad] = error.findDetails(BadRequest);
  const fields = bad?.fieldViolations.map((violation) => violation.field) ?? [];
  check(["spec.name", "spec.max_turns"].every((field) => fields.includes(field)), `${what}: the fields that are wrong: ${fields}`);
  const missing = { task: `task_${randomUUID()}` };
  await refused(Code.NotFound, `${what}: a task that is not there`, () => tasks.getTask(missing, patience));

  // A subscription that replays earlier events and continues with new ones.
  const subscription = { task: task.metadata.id, cursor: "0", types: ["task.*"] };
  const stop = new AbortController();
  const types = [];
  let cursor;
  try {
    for await (const event of events.subscribe(subscription, { ...patience, signal: stop.signal })) {
      types.push(event.type);
      if (event.type === "task.created") {
        cursor = event.cursor;
        await tasks.updateTask({ task: task.metadata.id, title: `${what}!` }, patience);
      }
      if (event.type === "task.updated") {
        check(event.payload.case === "task" && event.payload.value.spec.title === `${what}!`, `${what}: the change is published differently`);
        break;
      }
    }
  } catch (error) {
    wrong(`${what}: a subscription, after ${types}: ${error}`);
  }
  stop.abort();
  check(types.join() === "task.created,task.updated", `${what}: the events: ${types}`);
  for await (const event of events.subscribe({ ...subscription, cursor }, patience)) {
    check(event.type === "task.updated", `${what}: after the cursor comes ${event.type}`);
    break;
  }

  const began = Date.now();
  await refused(Code.DeadlineExceeded, `${what}: a subscription with a deadline`, async () => {
    for await (const event of events.subscribe({ task: task.metadata.id }, { timeoutMs: 500 })) types.push(event.type);
    return `the end of the stream after ${Date.now() - began} ms`;
  });
  check(Date.now() - began < 10_000, `${what}: the deadline came after ${Date.now() - began} ms`);

  const stranger = clients(make({ baseUrl, interceptors: [bearer(`${key}x`)], ...options }));
  await refused(Code.Unauthenticated, `${what}: a wrong key`, () => stranger.organizations.whoAmI({}, patience));
  // Refused requests are answered before their body is read. Over HTTP/1.1 this ends the
  // connection, and a client that sends its body after its head may see the end before it reads the
  // answer.
  if (options.httpVersion !== "1.1") {
    await refused(Code.Unauthenticated, `${what}: a stream with a wrong key`, async () => {
      for await (const event of stranger.events.subscribe({}, patience)) return event.type;
      return "the end of the stream";
    });
  }
  check((await organizations.whoAmI({}, patience)).organizationId !== "", `${what}: who am I`);
  await tasks.deleteTask({ task: task.metadata.id }, patience);
  done(what);
}

const { agents, models, providers } = clients(createConnectTransport({ baseUrl, httpVersion: "1.1", interceptors: [bearer(key)] }));
await providers.createModelProvider({ spec: { name, type } });
await models.createModel({ spec: { name, provider: name } });
const made = await agents.createAgent({ spec: { name, model: name, instructions } });
const asked = await agents.getAgent({ agent: made.metadata.id });
check(equals(services.agents.method.getAgent.output, made, asked), "the agent is another one when it is asked for");
check(toBinary(services.agents.method.getAgent.output, made).length > 5000, "the agent has no instructions");

for (const [what, make, options] of [
  ["Connect, JSON, HTTP/1.1", createConnectTransport, { httpVersion: "1.1", useBinaryFormat: false }],
  ["Connect, protobuf, HTTP/1.1", createConnectTransport, { httpVersion: "1.1", useBinaryFormat: true }],
  ["Connect, JSON, HTTP/2", createConnectTransport, { httpVersion: "2", useBinaryFormat: false }],
  ["Connect, protobuf, HTTP/2", createConnectTransport, { httpVersion: "2", useBinaryFormat: true }],
  ["Connect with GET, JSON", createConnectTransport, { httpVersion: "1.1", useBinaryFormat: false, useHttpGet: true }],
  ["Connect with GET, protobuf", createConnectTransport, { httpVersion: "1.1", useBinaryFormat: true, useHttpGet: true }],
  ["gRPC-Web, HTTP/1.1", createGrpcWebTransport, { httpVersion: "1.1" }],
  ["gRPC-Web, HTTP/2", createGrpcWebTransport, { httpVersion: "2" }],
  ["gRPC", createGrpcTransport, {}],
]) {
  await works(what, make, { ...options, ...none }, { packs: false });
  await works(`${what}, with gzip`, make, { ...options, ...gzip }, { packs: true });
}

console.log("connect-node works");
// Connections are kept open for a while.
process.exit(0);
