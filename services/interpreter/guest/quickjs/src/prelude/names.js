// Suggestions for unknown names, for the model that wrote the script.
(function (native, inner) {
  'use strict';
  const { unbind } = inner;
  const slice = unbind(String.prototype.slice);
  const toLowerCase = unbind(String.prototype.toLowerCase);
  const endsWith = unbind(String.prototype.endsWith);
  const includes = unbind(String.prototype.includes);
  const join = unbind(Array.prototype.join);

  // Every name of a tool, in the order of the table; set when a run starts.
  inner.toolNames = [];

  const MAX_LENGTH = 40; // Longer names are compared by their beginnings.
  const MAX_LISTED = 60; // Tools named in a message.

  // `readFile` and `read_file` are the same word.
  function fold(name) {
    let text = '';
    const lower = toLowerCase(slice(name, 0, MAX_LENGTH));
    for (let i = 0; i < lower.length; i++) if (lower[i] !== '_' && lower[i] !== '-') text += lower[i];
    return text;
  }

  // The edit distance: characters to add, remove, replace or swap with their neighbor.
  function distance(a, b) {
    let before = [];
    let last = [];
    for (let j = 0; j <= b.length; j++) last[j] = j;
    for (let i = 1; i <= a.length; i++) {
      const next = [i];
      for (let j = 1; j <= b.length; j++) {
        let best = last[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1);
        if (last[j] + 1 < best) best = last[j] + 1;
        if (next[j - 1] + 1 < best) best = next[j - 1] + 1;
        if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1] && before[j - 2] + 1 < best) best = before[j - 2] + 1;
        next[j] = best;
      }
      before = last;
      last = next;
    }
    return last[b.length];
  }

  // The tools with the most similar names, at most three.
  function similar(name) {
    const wanted = fold(name);
    const found = [];
    for (let allowed = 0; allowed <= wanted.length / 3; allowed++) {
      for (let i = 0; i < inner.toolNames.length && found.length < 3; i++) {
        if (distance(wanted, fold(inner.toolNames[i])) === allowed) found[found.length] = inner.toolNames[i];
      }
      if (found.length > 0) return found;
    }
    for (let i = 0; i < inner.toolNames.length && found.length < 3; i++) {
      const other = fold(inner.toolNames[i]);
      if (wanted.length > 3 && other.length > 3 && (includes(other, wanted) || includes(wanted, other))) found[found.length] = inner.toolNames[i];
    }
    return found;
  }

  // The existing ones of these tools, as a list for a sentence; empty if there are none.
  inner.present = (tools) => {
    const there = [];
    for (let i = 0; i < tools.length; i++) {
      for (let j = 0; j < inner.toolNames.length; j++) if (inner.toolNames[j] === tools[i]) there[there.length] = tools[i];
    }
    return join(there, ', ');
  };

  inner.unknownTool = (name) => {
    const near = similar(name);
    const meant = near.length > 0 ? ` Did you mean ${join(near, ' or ')}?` : '';
    const listed = [];
    for (let i = 0; i < inner.toolNames.length && i < MAX_LISTED; i++) listed[i] = inner.toolNames[i];
    const more = inner.toolNames.length > MAX_LISTED ? ', …' : '';
    return `There is no tool ${name}.${meant} The tools are: ${join(listed, ', ')}${more}.`;
  };

  // Names from other environments.
  const elsewhere = {
    __proto__: null,
    module: 'Files that are imported use `export`.',
    exports: 'Files that are imported use `export`.',
    process: 'This is not Node.js.',
    Buffer: 'This is not Node.js; use Uint8Array, TextEncoder and TextDecoder, atob and btoa.',
    __dirname: 'This is not Node.js; paths are relative to the workspace.',
    __filename: 'This is not Node.js; paths are relative to the workspace.',
    global: 'Use globalThis.',
    window: 'This is no browser; use globalThis.',
    document: 'This is no browser.',
    Deno: 'This is not Deno.',
    Bun: 'This is not Bun.',
  };
  const UNDEFINED = ' is not defined';

  // The addition to the message of an uncaught error; usually empty.
  inner.hint = (name, message) => {
    if (name !== 'ReferenceError' || !endsWith(message, UNDEFINED)) return '';
    const missing = slice(message, 0, message.length - UNDEFINED.length);
    if (missing === 'require') {
      const tools = inner.present(['read_file', 'create_file', 'execute_command', 'fetch']);
      const instead = tools === '' ? '' : ` What fs, child_process and http are for, tools do: ${tools}.`;
      return `. There are no CommonJS modules; files of the workspace are imported with \`import … from "./file.ts"\`.${instead}`;
    }
    if (elsewhere[missing] !== undefined) return `. ${elsewhere[missing]}`;
    const near = similar(missing);
    return near.length > 0 ? `. Did you mean the tool ${join(near, ' or ')}?` : '';
  };
})
