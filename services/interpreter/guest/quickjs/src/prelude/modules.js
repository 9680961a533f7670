// Explains that a module does not exist, and what to use instead.
(function (native, inner) {
  'use strict';
  const { unbind, present } = inner;
  const slice = unbind(String.prototype.slice);
  const startsWith = unbind(String.prototype.startsWith);
  const indexOf = unbind(String.prototype.indexOf);
  const matches = unbind(RegExp.prototype.exec);
  const NativeTypeError = TypeError;

  const files = ['Files are read and written by the tools', ['read_file', 'create_file', 'edit_file', 'list_files', 'find_file']];
  const commands = ['Commands are run by the tool', ['execute_command']];
  const requests = ['Requests are made by the tool', ['fetch']];
  const search = ['Files are found by the tools', ['find_file', 'list_files', 'grep']];
  const paths = ['Paths are plain text, relative to the workspace: join them with template literals, split them with split("/").'];
  const builtIn = (what) => [`Use what is built in: ${what}.`];

  // By the name of a module that a model may expect: [text, tools to list after the text].
  const instead = {
    __proto__: null,
    fs: files, 'fs-extra': files, 'graceful-fs': files,
    child_process: commands, execa: commands, shelljs: commands, zx: commands,
    http: requests, https: requests, net: requests, 'node-fetch': requests, axios: requests, undici: requests, got: requests, request: requests, ky: requests,
    glob: search, globby: search, 'fast-glob': search,
    path: paths, 'path-browserify': paths,
    url: builtIn('URL and URLSearchParams'),
    querystring: builtIn('URLSearchParams'), qs: builtIn('URLSearchParams'),
    crypto: builtIn('crypto.randomUUID and crypto.getRandomValues'), uuid: builtIn('crypto.randomUUID'), nanoid: builtIn('crypto.randomUUID'),
    util: builtIn('structuredClone, TextEncoder, TextDecoder and print'),
    buffer: builtIn('Uint8Array, TextEncoder, TextDecoder, atob and btoa'),
    timers: builtIn('setTimeout and setInterval'), perf_hooks: builtIn('performance.now'),
    events: builtIn('callbacks and promises'), stream: builtIn('async iteration'),
    assert: builtIn('if (!condition) throw new Error("…")'), chai: builtIn('if (!condition) throw new Error("…")'),
    lodash: builtIn('the methods of Array, Object, Map and Set'), underscore: builtIn('the methods of Array, Object, Map and Set'),
    moment: builtIn('Date'), dayjs: builtIn('Date'), 'date-fns': builtIn('Date'),
    os: commands, process: commands, worker_threads: ['Calls of tools run concurrently: await Promise.all([tools.…, tools.…]).'],
    readline: ['There is nobody to ask while a script runs; end it, and ask in your answer.'],
  };
  const RELATIVE = 'Scripts import files of the workspace, by a path relative to the importing file that begins with ./ or ../.';
  const looksLikeFile = /\.(?:m?[jt]s|json)$/;

  // The error for a specifier that is not a relative path.
  inner.refuse = (specifier) => {
    const no = `There is no module "${specifier}".`;
    if (startsWith(specifier, '/')) return new NativeTypeError(`${no} ${RELATIVE}`);
    let name = startsWith(specifier, 'node:') ? slice(specifier, 5) : specifier;
    if (indexOf(name, ':') >= 0) return new NativeTypeError(`${no} Code is not loaded from elsewhere. ${RELATIVE}`);
    if (matches(looksLikeFile, name) !== null && name[0] !== '@') return new NativeTypeError(`${no} For the file of that name write "./${name}".`);
    const slash = indexOf(name, '/');
    if (slash > 0 && name[0] !== '@') name = slice(name, 0, slash);
    if (instead[name] === undefined) {
      return new NativeTypeError(`${no} There are no packages: write what you need of it yourself, or run a command that has it. ${RELATIVE}`);
    }
    const [words, tools] = instead[name];
    if (tools === undefined) return new NativeTypeError(`${no} ${words}`);
    const there = present(tools);
    return new NativeTypeError(there === '' ? `${no} ${RELATIVE}` : `${no} ${words} ${there}.`);
  };
})
