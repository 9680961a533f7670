// A certified OpenID provider (npm's oidc-provider) on this machine, for `construct login`: its
// pages accept any name. Keys, users and sessions vanish when it ends.
//
// Usage: node issuer.mjs, beside `node_modules` with the packages of package.json. Prints its address in the first line.

import { generateKeyPairSync } from "node:crypto";
import { createServer } from "node:http";

import Provider from "oidc-provider";

// The audience of the gateway that accepts access tokens; the other one accepts ID tokens for the
// client.
const RESOURCE = "https://construct.example.com";
const CLIENT = "construct-cli";
// Seconds. A session is renewed less than a minute before its end: here, by every command.
const SHORT = 45;

function key(kid, alg, type, options) {
  const { privateKey } = generateKeyPairSync(type, options);
  return { ...privateKey.export({ format: "jwk" }), kid, alg, use: "sig" };
}

const server = createServer();
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const issuer = `http://127.0.0.1:${server.address().port}`;

const provider = new Provider(issuer, {
  clients: [
    {
      client_id: CLIENT,
      application_type: "native",
      token_endpoint_auth_method: "none",
      grant_types: ["authorization_code", "refresh_token", "urn:ietf:params:oauth:grant-type:device_code"],
      response_types: ["code"],
      redirect_uris: ["http://127.0.0.1/"],
      id_token_signed_response_alg: "EdDSA",
    },
  ],
  enabledJWA: { idTokenSigningAlgValues: ["EdDSA", "PS256", "RS256"] },
  jwks: {
    keys: [
      key("rsa", "PS256", "rsa", { modulusLength: 2048 }),
      key("rsa-usual", "RS256", "rsa", { modulusLength: 2048 }),
      key("ed", "EdDSA", "ed25519"),
    ],
  },
  claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["name"] },
  // The claims of the scopes are in the ID token, where the gateway reads them.
  conformIdTokenClaims: false,
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, email: `${id}@example.com`, email_verified: true, name: `${id[0].toUpperCase()}${id.slice(1)}` }),
  }),
  ttl: { AccessToken: SHORT, IdToken: SHORT, DeviceCode: 300, RefreshToken: 3600, Grant: 3600, Interaction: 300, Session: 3600 },
  features: {
    deviceFlow: { enabled: true },
    revocation: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: (_ctx, _client, oneOf) => oneOf ?? [],
      useGrantedResource: () => true,
      getResourceServerInfo: (_ctx, resource) => {
        if (resource !== RESOURCE) throw new Error(`${resource} is not known here`);
        return { scope: "", audience: RESOURCE, accessTokenFormat: "jwt", accessTokenTTL: SHORT, jwt: { sign: { alg: "PS256" } } };
      },
    },
  },
});
provider.on("server_error", (_ctx, error) => console.error(error));
server.on("request", provider.callback());
console.log(issuer);
