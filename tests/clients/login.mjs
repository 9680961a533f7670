// `construct login` at a real issuer (issuer.mjs); this script acts as the person and the browser.
// It logs in with a code for another device, whose ID token (EdDSA) one gateway accepts, and with a
// browser of this machine, whose access token (PS256) is for another gateway.
//
// CONSTRUCT is the command's program. Started by the test `people_log_in_at_a_real_issuer`; `./dev
// clients` runs it.

import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

// Milliseconds; longer than any step takes.
const TIMEOUT = 60_000;

function wrong(what) {
  console.error(`wrong: ${what}`);
  process.exit(1);
}

function check(holds, what) {
  if (!holds) wrong(what);
}

function done(what) {
  console.log(`ok: construct login: ${what}`);
}

function environment(name) {
  return process.env[name] || wrong(`${name} has to be set`);
}

for (const kind of ["uncaughtException", "unhandledRejection"]) process.on(kind, (error) => wrong(error?.stack ?? error));
const program = environment("CONSTRUCT");
const gateways = { work: environment("CONSTRUCT_GATEWAY_URL"), other: environment("CONSTRUCT_OTHER_GATEWAY_URL") };
const issuer = environment("CONSTRUCT_ISSUER");
const home = mkdtempSync(join(tmpdir(), "construct-login-"));
process.on("exit", () => rmSync(home, { recursive: true, force: true }));

// Runs the command. `onErrors` is called with all of its standard error so far, whenever that
// grows.
function construct(args, onErrors = () => {}) {
  const env = { HOME: home, PATH: "/usr/bin:/bin", CONSTRUCT_KEYRING: "never", NO_PROXY: "127.0.0.1" };
  const child = spawn(program, args, { env, stdio: ["ignore", "pipe", "pipe"], timeout: TIMEOUT });
  const said = { output: "", errors: "" };
  child.stdout.on("data", (bytes) => (said.output += bytes));
  child.stderr.on("data", (bytes) => {
    said.errors += bytes;
    onErrors(said.errors);
  });
  return new Promise((ended, failed) => {
    child.on("error", failed);
    child.on("close", (code) => ended({ code, ...said }));
  });
}

async function works(...args) {
  const done = await construct(args);
  check(done.code === 0, `construct ${args.join(" ")}: ${done.code}\n${done.output}${done.errors}`);
  return done.output;
}

// A browser of a user called `name`, who fills in every form of the issuer and agrees.
async function visit(address, name, code) {
  const cookies = new Map();
  let [url, form] = [new URL(address), undefined];
  for (let steps = 0; steps < 30; steps++) {
    const answer = await fetch(url, {
      method: form ? "POST" : "GET",
      body: form,
      redirect: "manual",
      // Cookies of one host; those of the command's port are ignored.
      headers: url.origin === issuer ? { cookie: [...cookies].map((pair) => pair.join("=")).join("; ") } : {},
    });
    for (const cookie of answer.headers.getSetCookie()) {
      const [, key, value] = /^([^=]+)=([^;]*)/.exec(cookie);
      if (value) cookies.set(key, value);
      else cookies.delete(key);
    }
    const text = await answer.text();
    if (answer.status >= 300 && answer.status < 400) {
      [url, form] = [new URL(answer.headers.get("location"), url), undefined];
      continue;
    }
    check(answer.ok, `${url}: ${answer.status} ${text}`);
    const action = /<form[^>]* action="([^"]+)"/.exec(text);
    if (!action) return text;
    form = new URLSearchParams();
    for (const [input] of text.matchAll(/<input[^>]*>/g)) {
      const attribute = (name) => new RegExp(` ${name}="([^"]*)"`).exec(input.replaceAll(/\s+/g, " "))?.[1];
      const filled = { login: name, password: "anything", user_code: code }[attribute("name")];
      if (attribute("name")) form.set(attribute("name"), attribute("value") ?? filled ?? "");
    }
    url = new URL(action[1], url);
  }
  return wrong(`${address} leads nowhere`);
}

const kept = (context) => {
  const { key, login } = JSON.parse(readFileSync(join(home, ".config/construct/contexts.json"), "utf8")).contexts[context];
  return login && JSON.parse(key);
};
const header = (token) => JSON.parse(Buffer.from(token.split(".")[0], "base64url"));

for (const [name, address] of Object.entries(gateways)) await works("context", "add", name, "--address", address);
const nobody = await construct(["whoami"]);
check(nobody.code === 1 && nobody.errors.includes("construct login"), `nobody is logged in: ${nobody.code} ${nobody.errors}`);

// A code, entered on another device.
let visited;
const byCode = await construct(["login"], (errors) => {
  const found = /open (\S+) and enter the code (\S+)/.exec(errors);
  if (found && !visited) visited = visit(found[1], "ada", found[2]);
});
await visited;
check(byCode.code === 0 && byCode.output.includes("as Ada"), `by a code: ${byCode.code} ${byCode.output}${byCode.errors}`);
check(header(kept("work").token).alg === "EdDSA", `the token is signed with ${header(kept("work").token).alg}`);
done("with a code");

// Tokens are short-lived here: each command renews. The issuer treats the second use of a refresh
// token as theft and ends the session.
let before = kept("work");
check((await works("whoami")).includes("ada@example.com"), "who am I");
let after = kept("work");
check(after.refresh && after.refresh !== before.refresh, "the session is not renewed");
const several = await Promise.all(Array.from({ length: 4 }, () => works("whoami", "-o", "json")));
check(new Set(several).size === 1, `who am I, several times at once: ${several}`);
await works("organization", "list");
done("is renewed, also by several commands at once");

// A browser of this machine.
visited = undefined;
const byBrowser = await construct(["login", "--context", "other", "--browser"], (errors) => {
  const found = /open (http\S+)\n/.exec(errors);
  if (found && !visited) visited = visit(found[1], "bob");
});
check((await visited).includes("close this page"), `what the browser shows: ${await visited}`);
check(byBrowser.code === 0, `by a browser: ${byBrowser.code} ${byBrowser.output}${byBrowser.errors}`);
check(header(kept("other").token).alg === "PS256", `the token is signed with ${header(kept("other").token).alg}`);
const bob = JSON.parse(await works("--context", "other", "whoami", "-o", "json"));
const ada = JSON.parse(await works("whoami", "-o", "json"));
check(bob.userId && bob.userId !== ada.userId, `bob is ${JSON.stringify(bob)}`);
done("with a browser");

// A user who does not agree.
visited = undefined;
const refused = await construct(["login", "--context", "other", "--browser"], (errors) => {
  const found = /open (http\S+)\n/.exec(errors);
  const back = found && new URL(found[1]).searchParams;
  if (!back || visited) return;
  visited = fetch(`${back.get("redirect_uri")}?error=access_denied&state=${back.get("state")}&iss=${encodeURIComponent(issuer)}`);
});
check(refused.code === 1 && refused.errors.includes("access_denied"), `who does not agree: ${refused.code} ${refused.errors}`);
check(kept("other").refresh, "the log-in before it is gone");

before = kept("work");
await works("logout");
check(!kept("work"), "something is kept after the log-out");
const token = await fetch(`${issuer}/token`, {
  method: "POST",
  body: new URLSearchParams({ grant_type: "refresh_token", refresh_token: before.refresh, client_id: "construct-cli" }),
});
check(token.status === 400 && (await token.json()).error === "invalid_grant", "the issuer still takes the refresh token");
const out = await construct(["logout"]);
check(out.code === 2 && out.errors.includes("has no log-in"), `a second log-out: ${out.code} ${out.errors}`);
check((await construct(["whoami"])).code === 1, "somebody is still logged in");
await works("--context", "other", "whoami");
done("is forgotten, here and there");
console.log("construct login works");
process.exit(0);
