// URL and URLSearchParams. The Rust side parses (the WHATWG algorithm); the classes hold the
// result.
(function (native, inner) {
  'use strict';
  const toText = String;
  const NativeTypeError = TypeError;
  // The order is that of src/natives/url.rs.
  const FIELDS = ['href', 'origin', 'protocol', 'username', 'password', 'host', 'hostname', 'port', 'pathname', 'search', 'hash'];
  const SEARCH = FIELDS.indexOf('search');

  let follow; // Connects parameters to the URL that they update.

  class URLSearchParams {
    #pairs = [];
    #changed = null;
    static {
      follow = (parameters, changed) => { parameters.#changed = changed; };
    }
    constructor(init = '') {
      if (typeof init === 'object' && init !== null) {
        if (typeof init[Symbol.iterator] === 'function') {
          for (const pair of init) {
            const [name, value, ...rest] = pair;
            if (value === undefined || rest.length > 0) throw new NativeTypeError('each parameter must be a [name, value] pair');
            this.#pairs.push([toText(name), toText(value)]);
          }
        } else for (const name of Object.keys(init)) this.#pairs.push([name, toText(init[name])]);
      } else this.#parse(toText(init));
    }
    #parse(text) {
      this.#pairs = native.formParse(text[0] === '?' ? text.slice(1) : text);
    }
    #update() {
      if (this.#changed !== null) this.#changed(this.toString());
    }
    get size() { return this.#pairs.length; }
    append(name, value) { this.#pairs.push([toText(name), toText(value)]); this.#update(); }
    delete(name, value) {
      this.#pairs = this.#pairs.filter((p) => p[0] !== toText(name) || (value !== undefined && p[1] !== toText(value)));
      this.#update();
    }
    get(name) { return this.#pairs.find((p) => p[0] === toText(name))?.[1] ?? null; }
    getAll(name) { return this.#pairs.filter((p) => p[0] === toText(name)).map((p) => p[1]); }
    has(name, value) { return this.#pairs.some((p) => p[0] === toText(name) && (value === undefined || p[1] === toText(value))); }
    set(name, value) {
      const at = this.#pairs.findIndex((p) => p[0] === toText(name));
      if (at < 0) this.#pairs.push([toText(name), toText(value)]);
      else {
        this.#pairs[at][1] = toText(value);
        this.#pairs = this.#pairs.filter((p, i) => i <= at || p[0] !== toText(name));
      }
      this.#update();
    }
    sort() { this.#pairs.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0)); this.#update(); }
    forEach(callback, self) { for (const [name, value] of this.#pairs) callback.call(self, value, name, this); }
    *entries() { for (const [name, value] of this.#pairs) yield [name, value]; }
    *keys() { for (const [name] of this.#pairs) yield name; }
    *values() { for (const [, value] of this.#pairs) yield value; }
    [Symbol.iterator]() { return this.entries(); }
    toString() { return native.formSerialize(this.#pairs.flat()); }
    toJSON() { return this.toString(); }
    get [Symbol.toStringTag]() { return 'URLSearchParams'; }
  }

  class URL {
    #parts;
    #parameters = null;
    constructor(url, base) {
      const parts = native.urlParse(toText(url), base === undefined ? undefined : toText(base));
      if (parts === null) throw new NativeTypeError(`Invalid URL: ${toText(url)}`);
      this.#parts = parts;
    }
    static canParse(url, base) { return native.urlParse(toText(url), base === undefined ? undefined : toText(base)) !== null; }
    static parse(url, base) {
      try {
        return new URL(url, base);
      } catch {
        return null;
      }
    }
    get searchParams() {
      if (this.#parameters === null) {
        this.#parameters = new URLSearchParams(this.#parts[SEARCH]);
        follow(this.#parameters, (text) => { this.#parts = native.urlSet(this.#parts[0], 'search', text) ?? this.#parts; });
      }
      return this.#parameters;
    }
    toString() { return this.#parts[0]; }
    toJSON() { return this.#parts[0]; }
    get [Symbol.toStringTag]() { return 'URL'; }
    static {
      FIELDS.forEach((field, index) => {
        const property = { configurable: true, enumerable: true, get() { return this.#parts[index]; } };
        if (field !== 'origin') {
          property.set = function (value) {
            const parts = native.urlSet(this.#parts[0], field, toText(value));
            if (parts === null) {
              if (field === 'href') throw new NativeTypeError(`Invalid URL: ${value}`);
              return;
            }
            this.#parts = parts;
            this.#parameters = null;
          };
        }
        Object.defineProperty(URL.prototype, field, property);
      });
    }
  }
  inner.global('URL', URL);
  inner.global('URLSearchParams', URLSearchParams);
})
