// Event, EventTarget, AbortController and AbortSignal, as far as scripts use them.
(function (native, inner) {
  'use strict';
  const toText = String;
  const Exception = DOMException;
  const NativeTypeError = TypeError;
  const { setTimeout } = globalThis;

  class Event {
    #prevented = false;
    constructor(type, options = {}) {
      this.type = toText(type);
      this.cancelable = !!options?.cancelable;
      this.target = null;
    }
    preventDefault() { if (this.cancelable) this.#prevented = true; }
    get defaultPrevented() { return this.#prevented; }
  }

  class EventTarget {
    #listeners = [];
    addEventListener(type, listener, options = {}) {
      if (listener === null || listener === undefined) return;
      if (this.#listeners.some((l) => l.type === type && l.listener === listener)) return;
      this.#listeners.push({ type: toText(type), listener, once: options?.once === true });
    }
    removeEventListener(type, listener) {
      this.#listeners = this.#listeners.filter((l) => l.type !== type || l.listener !== listener);
    }
    dispatchEvent(event) {
      if (!(event instanceof Event)) throw new NativeTypeError('dispatchEvent needs an Event');
      event.target = this;
      const own = this[`on${event.type}`];
      const heard = this.#listeners.filter((l) => l.type === event.type);
      this.#listeners = this.#listeners.filter((l) => l.type !== event.type || !l.once);
      if (typeof own === 'function') heard.unshift({ listener: own });
      for (const { listener } of heard) {
        // An error in a listener does not reach the dispatcher.
        try {
          if (typeof listener === 'function') listener.call(this, event);
          else listener.handleEvent(event);
        } catch (error) {
          inner.unhandledError(error);
        }
      }
      return !event.defaultPrevented;
    }
  }

  let make; // Only this file creates and aborts signals.
  let abort;

  class AbortSignal extends EventTarget {
    #aborted = false;
    #reason = undefined;
    onabort = null;
    static #making = false;
    static {
      make = () => {
        AbortSignal.#making = true;
        try {
          return new AbortSignal();
        } finally {
          AbortSignal.#making = false;
        }
      };
      abort = (signal, reason = new Exception('This operation was aborted', 'AbortError')) => {
        if (signal.#aborted) return;
        signal.#aborted = true;
        signal.#reason = reason;
        signal.dispatchEvent(new Event('abort'));
      };
    }
    constructor() {
      if (!AbortSignal.#making) throw new NativeTypeError('a signal is made by an AbortController');
      super();
    }
    get aborted() { return this.#aborted; }
    get reason() { return this.#reason; }
    throwIfAborted() { if (this.#aborted) throw this.#reason; }
    static abort(reason) {
      const signal = make();
      abort(signal, reason);
      return signal;
    }
    static timeout(milliseconds) {
      const signal = make();
      setTimeout(() => abort(signal, new Exception('The operation timed out', 'TimeoutError')), milliseconds);
      return signal;
    }
    static any(signals) {
      const any = make();
      for (const signal of signals) {
        if (signal.aborted) abort(any, signal.reason);
        else signal.addEventListener('abort', () => abort(any, signal.reason), { once: true });
      }
      return any;
    }
  }

  class AbortController {
    #signal = make();
    get signal() { return this.#signal; }
    abort(reason) { abort(this.#signal, reason); }
  }

  inner.global('Event', Event);
  inner.global('EventTarget', EventTarget);
  inner.global('AbortSignal', AbortSignal);
  inner.global('AbortController', AbortController);
})
